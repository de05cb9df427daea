"""A fake worker and a load generator in C, faster than what they measure, and what starts them."""
