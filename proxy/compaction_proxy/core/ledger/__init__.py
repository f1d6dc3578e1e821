"""What the ledger tells: rules, requests, facts and values of a conversation, and how far it has come."""
