"""Tests of jackfield. They mirror `src/`; `zoo` and `reference` are what they compare with."""
