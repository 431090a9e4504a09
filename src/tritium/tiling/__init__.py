"""POLICY: what Inductor is asked to choose. Never correctness."""
