"""`kvrouter doctor`: looks at a whole fleet from one place, and reports what is wrong and what to do."""
