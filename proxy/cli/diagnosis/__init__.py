"""What `doctor` looks at, a module for each kind of thing; each gives findings, with what mends them."""
