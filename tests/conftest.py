"""What holds for all tests: a machine under load is no reason to fail one."""

from hypothesis import settings

settings.register_profile("jackfield", deadline=None)
settings.load_profile("jackfield")
