"""Is the trained policy better: one evaluation in numbers (`summary`), and two held together (`compare`)."""
