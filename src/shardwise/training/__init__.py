"""The trainer and the loop around it; `shardwise.fit` is their front door."""
