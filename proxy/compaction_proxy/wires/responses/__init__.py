"""The Responses wire: `POST …/responses`."""
