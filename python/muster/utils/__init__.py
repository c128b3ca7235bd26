"""torch.utils' names where they ask who is in the job."""
