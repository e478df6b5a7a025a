"""`hf-fastdecode inspect`: what sharing and slim caches would save, counted from configs."""
