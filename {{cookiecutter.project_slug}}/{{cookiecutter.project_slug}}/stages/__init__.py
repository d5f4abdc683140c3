"""The six stages, one readable file each, in the order they are walked."""

ORDER = ("data_audit", "skeleton", "overfit", "regularize", "tune", "squeeze")
