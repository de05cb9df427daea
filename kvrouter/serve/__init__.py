"""One command for a whole deployment: NATS, an agent for each engine, and the frontends, supervised."""
