"""The pages of trainings, served by Airflow's API server."""
