"""From a request to a target: candidates, filters, policy, cost."""
