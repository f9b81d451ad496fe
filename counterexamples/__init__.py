"""Stored counterexamples: ``CE-NNNN.json``, with the generated report and timeline beside each."""
