package deploy

import "testing"

// expect fails the test where ok is false; the test goes on.
func expect(t *testing.T, ok bool, format string, args ...any) {
	if !ok {
		t.Helper()
		t.Errorf(format, args...)
	}
}

// must ends the test where ok is false.
func must(t *testing.T, ok bool, format string, args ...any) {
	if !ok {
		t.Helper()
		t.Fatalf(format, args...)
	}
}

// noError ends the test where there is an error.
func noError(t *testing.T, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// value returns the value of a call, as in value(os.ReadFile(name))(t), and ends the test where the call has failed.
func value[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		noError(t, err)
		return v
	}
}
