package timezone

import (
	"strconv"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, name := range []string{"UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5"} {
		if zone, err := Parse(name); err != nil || zone.String() != name {
			t.Errorf("%q: %v, %v", name, zone, err)
		}
	}
	for _, name := range []string{
		"", "Local", "Mars", "europe/../Berlin", "../etc/passwd", "/etc/localtime", "Europe//Berlin", "Europe/Berlin/", "localtime",
		"posixrules", "right/Europe/Berlin", "Europe\x00Berlin", "Euröpe", strings.Repeat("A", 300), "a\nb",
	} {
		if zone, err := Parse(name); err == nil || !strings.Contains(err.Error(), "such as Europe/Berlin") || strings.ContainsAny(err.Error(), "\n\x00") || len(err.Error()) > 400 {
			t.Errorf("%q: %v, %v", name, zone, err)
		}
	}
}

func TestCache(t *testing.T) {
	var c Cache
	if zone := c.Known("Europe/Berlin"); zone != nil {
		t.Errorf("an empty cache knows %v", zone)
	}
	zone, err := c.Load("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.Load("Europe/Berlin"); again != zone || err != nil || c.Known("Europe/Berlin") != zone {
		t.Errorf("%p, %v; want %p again", again, err, zone)
	}
	if _, err := c.Load("Mars"); err == nil || c.Known("Mars") != nil {
		t.Errorf("Mars: %v", err)
	}
	// However many there are, it holds no more than most.
	for i := range 2 * most {
		c.by["x"+strconv.Itoa(i)] = zone
		if len(c.by) >= most {
			break
		}
	}
	if _, err := c.Load("UTC"); err != nil || len(c.by) > most || c.Known("UTC") == nil {
		t.Errorf("%v, %d zones", err, len(c.by))
	}
}
