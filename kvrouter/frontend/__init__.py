"""One replica: the OpenAI-compatible HTTP frontend with the router inside."""
