"""From a prompt to the hashes of its blocks: each way to its token ids, and the checks of each."""
