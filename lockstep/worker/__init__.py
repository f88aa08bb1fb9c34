"""The device side: the table, the step, its capture, and the object that launches schedules."""
