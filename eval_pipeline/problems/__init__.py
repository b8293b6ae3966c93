"""The problems of an evaluation: what is asked, and what decides whether an answer is right."""
