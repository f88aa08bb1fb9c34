"""Cache of attention pages and recurrent state, shared by prompt prefix."""
