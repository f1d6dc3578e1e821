"""The Messages wire: `POST …/v1/messages`."""
