"""What a recorded layer is, found by what it does."""
