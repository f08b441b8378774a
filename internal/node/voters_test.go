package node

import (
	"strings"
	"testing"
)

func TestParseVoters(t *testing.T) {
	for _, c := range []struct {
		list, name string
		want       string
		says       string // of the error
	}{
		{list: "", name: "weir-0", want: ""},
		{list: "a", name: "weir-0", want: "a"},
		{list: "a,b,c", name: "weir-0", want: "a b c"},
		{list: "a,b,c,d,e", name: "z", want: "a b c d e"},
		{list: "ordinals:1", name: "weir-0", want: "weir-0"},
		{list: "ordinals:3", name: "weir-7", want: "weir-0 weir-1 weir-2"},
		{list: "ordinals:5", name: "my-weir-12", want: "my-weir-0 my-weir-1 my-weir-2 my-weir-3 my-weir-4"},
		{list: "a,b", name: "a", says: "2 voters are given: the number of voters is 1, 3 or 5"},
		{list: "a,b,c,d", name: "a", says: "4 voters are given"},
		{list: "a,b,c,d,e,f,g", name: "a", says: "7 voters are given"},
		{list: "a,b,b", name: "a", says: `"b" is given twice`},
		{list: "a,,b", name: "a", says: `"" must have 1 to 63 characters`},
		{list: "a,b,c d", name: "a", says: `"c d" must consist of`},
		{list: "a,ordinals:3,b", name: "a-0", says: `"ordinals:3" must consist of`},
		{list: "ordinals:2", name: "weir-0", says: "ordinals:2: the number of voters is 1, 3 or 5"},
		{list: "ordinals:0", name: "weir-0", says: "ordinals:0: the number"},
		{list: "ordinals:", name: "weir-0", says: "ordinals:: the number"},
		{list: "ordinals:-3", name: "weir-0", says: "ordinals:-3: the number"},
		{list: "ordinals:259", name: "weir-0", says: "ordinals:259: the number"}, // 3, of a byte
		{list: "ordinals:3", name: "weir", says: "ordinals:3: name weir does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "-1", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-a1", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-01", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-99999999999", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: strings.Repeat("w", 61) + "-123", says: ""},
	} {
		var list []string
		if c.list != "" {
			list = strings.Split(c.list, ",")
		}
		got, err := ParseVoters(list, c.name)
		if err == nil {
			err = checkVoters(got)
		}
		switch {
		case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s of %s: %q, %v; want %q", c.list, c.name, got, err, c.says)
		case c.says == "" && c.want != strings.Join(got, " ") && len(c.name) < 64:
			t.Errorf("%s of %s: %q, %v; want %s", c.list, c.name, got, err, c.want)
		}
	}
}
