"""What `mindrlhf doctor` looks at."""
