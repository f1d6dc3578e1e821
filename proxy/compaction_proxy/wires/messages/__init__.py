"""The Messages wire format."""
