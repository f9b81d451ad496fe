"""Bounded search with Z3: smallest counterexamples, proofs within bounds. The only importer of z3."""
