"""What requests and rounds cost, and what rounds save."""
