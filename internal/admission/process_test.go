package admission

import (
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{
		"auto": 0, "0": -1, "16MiB": 16 << 20, "16777216": 16 << 20, "512MiB": 512 << 20, "1.5GiB": 3 << 29, "2GB": 2e9, "2 gb": 2e9,
	} {
		got, err := ParseMemory(text)
		expect.True(t, got == want && err == nil, "%q: %d, %v; want %d", text, got, err, want)
	}
	whole := must.Value(ParseMemory("100%"))(t)
	if half, err := ParseMemory("50%"); err != nil || half <= 0 || half > whole/2 || half < whole/2-100 {
		t.Errorf("50%% is %d, %v; 100%% is %d", half, err, whole)
	}
	for _, text := range []string{
		"", "%", "0%", "101%", "-1%", "1.5%", "70 %", "-1", "-1GiB", "many", "1MiBs", "15.9MiB", "1", "9EiB", "99999999999999999999",
	} {
		got, err := ParseMemory(text)
		expect.True(t, err != nil && strings.Contains(err.Error(), text), "%q: %d, %v", text, got, err)
	}
}
