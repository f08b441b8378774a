package auth

import (
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// FuzzAuthorization: only the header that has the token, whatever else it is like, authenticates its caller.
func FuzzAuthorization(f *testing.F) {
	for _, header := range []string{"", "Bearer " + shop, "bearer   " + shop, "Bearer", "Bearer ", "Basic " + shop,
		"Bearer " + Hash(shop), shop, "Bearer " + shop + " ", "Bearer\t" + shop, "Bearer \xff"} {
		f.Add(header, header)
	}
	f.Fuzz(func(t *testing.T, first, second string) {
		w := watch(t)
		for _, headers := range [][]string{{first}, {first, second}} {
			r := request(t, "/v1/check", headers...)
			ctx, denial := w.HTTP(r, RoleCheck)
			scheme, token, _ := strings.Cut(first, " ")
			right := len(headers) == 1 && strings.EqualFold(scheme, "Bearer") && strings.TrimLeft(token, " ") == shop
			expect.True(t, (denial == nil) == right && right == (ctx != nil && Authenticated(ctx)),
				"%q: %+v", headers, denial)
			expect.True(t, denial == nil || !denial.Authenticated || denial.Reason == WrongRole,
				"%q: %+v", headers, denial)
		}
	})
}
