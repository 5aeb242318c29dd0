"""What looks at a finished or running encoder: the evaluation loop, features, kNN, results files."""
