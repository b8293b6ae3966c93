"""Tests of single parts, in the process of the tests or in one that a part starts itself."""
