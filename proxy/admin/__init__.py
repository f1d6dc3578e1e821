"""What operators see: health now; API, metrics and UI join here."""
