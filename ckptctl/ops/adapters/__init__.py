"""What an adapter's configuration says."""
