"""SHARING: one process keeps a pipeline's weights, and others map them: `tritium keep` and `tritium.attach`."""
