"""From a schedule to numbers: models as rows of stacked tensors, sums, training, evaluation."""
