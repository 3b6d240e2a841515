"""Context parallelism: attention to sequences whose tokens are split over ranks."""
