package timezone

import (
	"strconv"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestParse(t *testing.T) {
	for _, name := range []string{"UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5"} {
		zone, err := Parse(name)
		expect.True(t, err == nil && zone.String() == name, "%q: %v, %v", name, zone, err)
	}
	for _, name := range []string{
		"", "Local", "Mars", "europe/../Berlin", "../etc/passwd", "/etc/localtime", "Europe//Berlin", "Europe/Berlin/",
		"localtime",
		"posixrules", "right/Europe/Berlin", "Europe\x00Berlin", "Euröpe", strings.Repeat("A", 300), "a\nb",
	} {
		zone, err := Parse(name)
		expect.True(t, err != nil && strings.Contains(err.Error(), "such as Europe/Berlin") &&
			!strings.ContainsAny(err.Error(), "\n\x00") && len(err.Error()) <= 400, "%q: %v, %v", name, zone, err)
	}
}

func TestCache(t *testing.T) {
	var c Cache
	expect.Equal(t, c.Known("Europe/Berlin"), nil, "an empty cache knows")
	zone := must.Value(c.Load("Europe/Berlin"))(t)
	if again, err := c.Load("Europe/Berlin"); again != zone || err != nil || c.Known("Europe/Berlin") != zone {
		t.Errorf("%p, %v; want %p again", again, err, zone)
	}
	_, err := c.Load("Mars")
	expect.True(t, err != nil && c.Known("Mars") == nil, "Mars: %v", err)
	// However many there are, it holds no more than most.
	for i := range 2 * most {
		c.by["x"+strconv.Itoa(i)] = zone
		if len(c.by) >= most {
			break
		}
	}
	_, err = c.Load("UTC")
	expect.True(t, err == nil && len(c.by) <= most && c.Known("UTC") != nil, "%v, %d zones", err, len(c.by))
}
