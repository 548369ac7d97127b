"""Per-sample losses: of a model's head, of a Trainer's ``compute_loss``, or of pairs of texts."""
