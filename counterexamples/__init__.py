"""hitproof.counterexamples."""
