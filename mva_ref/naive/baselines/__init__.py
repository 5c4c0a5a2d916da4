"""Every other attention system the paper compares itself with or builds on, one file each: quadratic form, recurrent form, parametrisation.

Two files hold what several share: kernel.py (features, divided by their sum) and decayed.py (linear recurrences with decay).
"""
