package ownership

import (
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

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
			expect.Equal(t, a.Compare(b), want, "%v compared with %v", a, b)
			if a.Less(b) != (i < j) {
				t.Errorf("%v less than %v: %v", a, b, a.Less(b))
			}
		}
	}
	expect.Equal(t, (Term{Epoch: 3, N: 14<<16 | 0x2a}).String(), "3.14/002a", "String")
	for _, old := range rising {
		a, b := old.after(0x1234_5678), old.after(0x1234_5679)
		expect.True(t, (old.N>>16 >= 1<<47 || old.Less(a) && old.Less(b)) && a != b && a.Epoch == old.Epoch,
			"after %v: %v and %v", old, a, b)
	}
}
