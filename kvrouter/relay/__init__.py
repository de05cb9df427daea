"""HTTP/1.1 on both sides: clients' requests in, workers' answers out. Knows no OpenAI."""
