package wire

import (
	"testing"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func TestLimitNonsense(t *testing.T) {
	for _, test := range []struct {
		limit *weirv1.Limit
		field string
	}{
		{&weirv1.Limit{}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: -1}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 8}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 256 + 4}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 4, Period: -1}, "limit.period"},
		{&weirv1.Limit{Algorithm: 4, Period: 8}, "limit.period"},
		{&weirv1.Limit{Algorithm: 4, Period: 256 + 1}, "limit.period"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "Mars/Olympus"}, "limit.time_zone"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "Local"}, "limit.time_zone"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "../../etc/passwd"}, "limit.time_zone"},
	} {
		if _, err := Target(&weirv1.Target{Limit: test.limit, Key: "k"}); err == nil || err.Field != test.field || err.Kind != limit.Invalid || err.Message == "" {
			t.Errorf("%+v: %v", test.limit, err)
		}
	}
	if got, err := Target(nil); err != nil || got != (limit.Target{}) {
		t.Errorf("no target at all: %+v, %v", got, err)
	}
}
