"""One model on all the workers of a pool: trainings by Ray Train's interface, and predictions."""
