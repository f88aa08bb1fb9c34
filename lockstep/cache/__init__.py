"""The cache: pages and slots, shared by prefix, in four verbs. Knows ids, never tensors."""
