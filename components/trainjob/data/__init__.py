"""Moving datasets and models between locations."""
