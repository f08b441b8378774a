// Package expect holds the checks of tests: each reports what does not hold, and the test goes on. Package must has the
// same checks, which end the test. They are generic, so that a constant takes the type of what it is compared with, and
// what they are given after the values says which case failed: a format and its arguments.
package expect

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// True fails the test where ok is false.
func True(t testing.TB, ok bool, format string, args ...any) bool {
	if !ok {
		t.Helper()
		t.Errorf(format, args...)
	}
	return ok
}

// Equal fails the test where got is not want.
func Equal[T comparable](t testing.TB, got, want T, which ...any) bool {
	if got != want {
		t.Helper()
		t.Errorf("%sgot %+v, want %+v", prefix(which), got, want)
	}
	return got == want
}

// NoError fails the test where there is an error.
func NoError(t testing.TB, err error, which ...any) bool {
	if err != nil {
		t.Helper()
		t.Errorf("%s%v", prefix(which), err)
	}
	return err == nil
}

// ErrorIs fails the test where errors.Is(err, want) is false.
func ErrorIs(t testing.TB, err, want error, which ...any) bool {
	ok := errors.Is(err, want)
	if !ok {
		t.Helper()
		t.Errorf("%sgot error %v, want %v", prefix(which), err, want)
	}
	return ok
}

// ErrorContains fails the test where there is no error, or its text lacks want.
func ErrorContains(t testing.TB, err error, want string, which ...any) bool {
	ok := err != nil && strings.Contains(err.Error(), want)
	if !ok {
		t.Helper()
		t.Errorf("%sgot error %v, want one with %q", prefix(which), err, want)
	}
	return ok
}

// NoDiff fails the test where cmp.Diff found a difference.
func NoDiff(t testing.TB, diff string, which ...any) bool {
	if diff != "" {
		t.Helper()
		t.Errorf("%s\n%s", prefix(which), diff)
	}
	return diff == ""
}

// Err returns the error of a call whose value is of no interest, as in expect.ErrorIs(t, expect.Err(os.ReadFile(name)),
// fs.ErrNotExist).
func Err[T any](_ T, err error) error { return err }

func prefix(which []any) string {
	if len(which) == 0 {
		return ""
	}
	return fmt.Sprintf(fmt.Sprint(which[0]), which[1:]...) + ": "
}
