"""The live page, `GET /dashboard`. It only shows: whatever is changed with it goes through the lease API."""
