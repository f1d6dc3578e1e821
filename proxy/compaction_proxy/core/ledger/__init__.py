"""The ledger: the rules, requests, facts and values of a conversation, and its frontier."""
