"""MCP tools for agents: search what compactions removed, describe conversations, request compactions."""
