"""POLICY: the choices that Inductor leaves open, such as tilings. Never correctness."""
