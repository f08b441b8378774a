// Package must holds the checks of package expect for what the rest of a test needs: where one fails, the test ends.
package must

import (
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// True ends the test where ok is false.
func True(t testing.TB, ok bool, format string, args ...any) {
	if !ok {
		t.Helper()
		t.Fatalf(format, args...)
	}
}

// Equal ends the test where got is not want.
func Equal[T comparable](t testing.TB, got, want T, which ...any) {
	if got != want {
		t.Helper()
		end(t, expect.Equal(t, got, want, which...))
	}
}

// NoError ends the test where there is an error.
func NoError(t testing.TB, err error, which ...any) {
	if err != nil {
		t.Helper()
		end(t, expect.NoError(t, err, which...))
	}
}

// ErrorIs ends the test where errors.Is(err, want) is false.
func ErrorIs(t testing.TB, err, want error, which ...any) {
	t.Helper()
	end(t, expect.ErrorIs(t, err, want, which...))
}

// ErrorContains ends the test where there is no error, or its text lacks want.
func ErrorContains(t testing.TB, err error, want string, which ...any) {
	t.Helper()
	end(t, expect.ErrorContains(t, err, want, which...))
}

// NoDiff ends the test where cmp.Diff found a difference.
func NoDiff(t testing.TB, diff string, which ...any) {
	t.Helper()
	end(t, expect.NoDiff(t, diff, which...))
}

func end(t testing.TB, ok bool) {
	if !ok {
		t.FailNow()
	}
}

// Value returns the value of a call, as in must.Value(os.ReadFile(name))(t), and ends the test where the call has
// failed.
func Value[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
		return v
	}
}
