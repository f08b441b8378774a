package ownership

import "testing"

func TestTermOrder(t *testing.T) {
	rising := []Term{{}, {N: 1}, {N: 1 << 63}, {Epoch: 1}, {Epoch: 1, N: 7}, {Epoch: 2}, {Epoch: 1 << 63}}
	for i, a := range rising {
		for j, b := range rising {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := a.Compare(b); got != want {
				t.Errorf("%v compared with %v: %d, want %d", a, b, got, want)
			}
			if a.Less(b) != (i < j) {
				t.Errorf("%v less than %v: %v", a, b, a.Less(b))
			}
		}
	}
	if got := (Term{Epoch: 3, N: 14<<16 | 0x2a}).String(); got != "3.14/002a" {
		t.Errorf("String: %q", got)
	}
	for _, old := range rising {
		a, b := old.after(0x1234_5678), old.after(0x1234_5679)
		if old.N>>16 < 1<<47 && (!old.Less(a) || !old.Less(b)) || a == b || a.Epoch != old.Epoch {
			t.Errorf("after %v: %v and %v", old, a, b)
		}
	}
}
